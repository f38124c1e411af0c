"""DiLoCo (arXiv 2311.08105) as pure functions and codecs in torch, without network, files or clock."""
