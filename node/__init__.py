"""diloco-node: a peer that trains open language models together with others, without a master (DiLoCo)."""
