"""Which peers exist: the peer table, gossip and discovery."""
