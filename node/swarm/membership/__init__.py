"""Knowledge of the other peers: the peer table, gossip and discovery."""
