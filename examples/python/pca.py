"""Principal components: each rank has a part of the rows, and all ranks find those of all rows.

    kolo run -n 4 -- python pca.py [FILE]
"""

import sys

import numpy as np
import pykolo

COMPONENTS = 3


def rows(count=10_000, features=20, seed=2):
    """Rows that differ most in a few directions."""
    generator = np.random.default_rng(seed)
    return generator.normal(size=(count, features)) @ generator.normal(size=(features, features)) + 5


def principal_components(mine, comm):
    """Returns the mean, the components (one in each row) and the variance along each."""
    features = mine.shape[1]
    sums = np.append(mine.sum(axis=0), len(mine))
    comm.all_reduce(sums)
    count = sums[-1]
    mean = sums[:-1] / count
    # Of what is left of the mean: squares of large numbers would lose digits.
    scatter = np.ascontiguousarray((mine - mean).T @ (mine - mean))
    comm.all_reduce(scatter)
    variances, vectors = np.linalg.eigh(scatter / (count - 1))
    largest = np.argsort(variances)[::-1][: min(COMPONENTS, features)]
    return mean, vectors[:, largest].T, variances[largest]


def main():
    with pykolo.Communicator.from_env() as comm:
        mine = np.array_split(rows(), comm.world_size)[comm.rank]
        mean, components, variances = principal_components(mine, comm)
        if comm.rank == 0:
            print(f"{comm.world_size} ranks: variances {variances.round(3)}")
            if len(sys.argv) > 1:
                np.savez(sys.argv[1], mean=mean, components=components, variances=variances)


if __name__ == "__main__":
    main()
