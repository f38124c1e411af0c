"""The algorithm: DiLoCo (arXiv 2311.08105) in pure torch. Knows no network, no file, no clock, and nothing of ours."""
