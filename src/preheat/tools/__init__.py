"""Tools on top of the library: the command line, metrics, and the parts of the plugin for pytest."""
