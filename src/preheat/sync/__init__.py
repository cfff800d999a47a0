"""Copies entries between stores: cache directories, bundles, and servers that machines share."""
