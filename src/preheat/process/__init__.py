"""Plumbing below everything else: files, locks, forks, threads, call sites, and text for terminals."""
