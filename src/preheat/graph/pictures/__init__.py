"""Pictures of graphs: boxes and links, their places, and SVG and DOT as output."""
