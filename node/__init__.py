"""diloco-node: a peer that trains open language models together with others, without a master (DiLoCo)."""

__version__ = "0.1.0"
