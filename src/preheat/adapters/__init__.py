"""The library's kernels in the terms of other libraries; each is imported only where it is used."""
