"""scikit-learn's SGDClassifier, averaged: each rank trains on its part of the samples, and after each
epoch all ranks continue with the average of their models.

    kolo run -n 4 -- python sgd_classifier.py [FILE]
"""

import sys

import numpy as np
import pykolo
from sklearn.datasets import make_classification
from sklearn.linear_model import SGDClassifier

EPOCHS = 5


def samples():
    return make_classification(n_samples=8000, n_features=20, n_informative=10, n_classes=3, random_state=5)


def new_model(rank):
    """Each rank visits its samples in an order of its own."""
    return SGDClassifier(loss="log_loss", learning_rate="invscaling", eta0=0.1, random_state=rank)


def train(inputs, labels, classes, comm):
    model = new_model(comm.rank)
    for _ in range(EPOCHS):
        model.partial_fit(inputs, labels, classes=classes)
        comm.all_reduce(model.coef_, op="average")
        comm.all_reduce(model.intercept_, op="average")
    return model


def main():
    with pykolo.Communicator.from_env() as comm:
        inputs, labels = samples()
        mine = np.s_[comm.rank :: comm.world_size]
        model = train(inputs[mine], labels[mine], np.unique(labels), comm)
        if comm.rank == 0:
            print(f"{comm.world_size} ranks: accuracy {model.score(inputs, labels):.3f}")
            if len(sys.argv) > 1:
                np.savez(sys.argv[1], coef=model.coef_, intercept=model.intercept_)


if __name__ == "__main__":
    main()
