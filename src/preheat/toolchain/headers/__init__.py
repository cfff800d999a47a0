"""What a compile has read: the headers, their states, and the files that would hide them."""
