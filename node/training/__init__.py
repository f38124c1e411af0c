"""One node's own training: model, data, inner loop, evaluation, device and checkpoints."""
