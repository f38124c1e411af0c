"""Cuts the training text into one shard for each worker, by clustering its documents."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from node.training.corpus import Corpus, Split

CLUSTERING_PASSES = 25


def cluster(split: Split, clusters: int) -> npt.NDArray[np.int64]:
    """The cluster of each document, [D], by k-means on how often each byte occurs in it.

    Deterministic: the first centres are the documents at equal distances in the order of their length. Each cluster
    has at least one document.
    """
    counts = [
        np.bincount(split.tokens[start:end], minlength=258)[:256]
        for start, end in zip(split.offsets[:-1], split.offsets[1:], strict=True)
    ]
    # Square roots of frequencies, so that frequent bytes do not hide the others (Hellinger distance).
    features = np.sqrt(np.array([one / max(1, one.sum()) for one in counts]))
    by_length = np.argsort(np.diff(split.offsets), kind="stable")
    centres = features[by_length[np.linspace(0, len(features) - 1, clusters).astype(int)]]
    labels = np.zeros(len(features), np.int64)
    for _ in range(CLUSTERING_PASSES):
        distances = ((features[:, None, :] - centres[None, :, :]) ** 2).sum(2)
        labels = distances.argmin(1)
        for number in range(clusters):
            if not (labels == number).any():
                labels[distances[:, number].argmin()] = number
        centres = np.stack([features[labels == number].mean(0) for number in range(clusters)])
    return labels


def shard(corpus: Corpus, labels: npt.NDArray[np.int64], number: int) -> Corpus:
    """The corpus with the training documents of one cluster only. The held-out text stays whole."""
    chosen = np.flatnonzero(labels == number)
    offsets = corpus.train.offsets
    texts = [corpus.train.tokens[offsets[d] : offsets[d + 1]] for d in chosen]
    ends = np.cumsum([0, *(len(text) for text in texts)])
    return Corpus(train=Split(np.concatenate(texts), ends.astype(np.int64)), held_out=corpus.held_out)
