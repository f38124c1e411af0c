"""Cuts the training text into one shard for each worker, by clustering its documents."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from node.training.corpus import Corpus, Split

CLUSTERING_PASSES = 25


def cluster(split: Split, clusters: int) -> npt.NDArray[np.int64]:
    """The cluster of each document, [D], by k-means on how often each byte occurs in it; tokens are the weights.

    Deterministic: the first clusters are equal shares of the tokens along the first principal component.
    """
    lengths = np.diff(split.offsets)
    counts = [
        np.bincount(split.tokens[start:end], minlength=258)[:256]
        for start, end in zip(split.offsets[:-1], split.offsets[1:], strict=True)
    ]
    # Square roots of frequencies, so that frequent bytes do not hide the others (Hellinger distance).
    features = np.sqrt(np.array([one / max(1, one.sum()) for one in counts]))
    centred = (features - np.average(features, axis=0, weights=lengths)) * np.sqrt(lengths)[:, None]
    axis = np.linalg.svd(centred, full_matrices=False)[2][0]
    order = (features @ axis * np.sign(axis[np.abs(axis).argmax()])).argsort(kind="stable")
    labels = np.empty(len(features), np.int64)
    labels[order] = np.minimum(clusters - 1, lengths[order].cumsum() * clusters // lengths.sum())
    for _ in range(CLUSTERING_PASSES):
        mine = [labels == number for number in range(clusters)]
        centres = [np.average(features[one], axis=0, weights=lengths[one]) for one in mine]
        labels = np.stack([((features - centre) ** 2).sum(1) for centre in centres]).argmin(0)
    return labels


def shard(corpus: Corpus, labels: npt.NDArray[np.int64], number: int) -> Corpus:
    """The corpus with the training documents of one cluster only. The held-out text stays whole."""
    chosen = np.flatnonzero(labels == number)
    offsets = corpus.train.offsets
    texts = [corpus.train.tokens[offsets[d] : offsets[d + 1]] for d in chosen]
    ends = np.cumsum([0, *(len(text) for text in texts)])
    return Corpus(train=Split(np.concatenate(texts), ends.astype(np.int64)), held_out=corpus.held_out)
