"""Readers of compiled code: ELF files, cubins, fat binaries, and the PTX inside them."""
