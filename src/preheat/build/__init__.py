"""From a program to an artifact: looked up, or compiled once."""
