"""One node's own training: model, data, inner loop, evaluation, device, checkpoints. Knows no network and no swarm."""
