"""k-means: each rank has a part of the points, and all ranks find the centres of all points.

    kolo run -n 4 -- python k_means.py [FILE]
"""

import sys

import numpy as np
import pykolo

CENTRES = 5


def points(count=20_000, seed=1):
    """Points around CENTRES places."""
    generator = np.random.default_rng(seed)
    places = generator.uniform(-10, 10, (CENTRES, 3))
    return places[generator.integers(CENTRES, size=count)] + generator.normal(size=(count, 3))


def first_centres(mine, comm):
    """Points of rank 0, each of which is the farthest from those before."""
    centres = np.empty((CENTRES, mine.shape[1]))
    if comm.rank == 0:
        sample = mine[:500]
        centres[0] = sample[0]
        for i in range(1, CENTRES):
            centres[i] = sample[distances(sample, centres[:i]).min(axis=1).argmax()]
    return comm.broadcast(centres)


def distances(of, to):
    """The squares of the distances, a row for each point."""
    return ((of[:, None] - to) ** 2).sum(axis=2)


def k_means(mine, centres, comm, limit=100):
    """Lloyd's algorithm. Returns the centres and the number of steps."""
    for step in range(1, limit + 1):
        nearest = distances(mine, centres).argmin(axis=1)
        # A row for each centre: the sum of its points, and their number.
        sums = np.zeros((CENTRES, mine.shape[1] + 1))
        np.add.at(sums[:, :-1], nearest, mine)
        sums[:, -1] = np.bincount(nearest, minlength=CENTRES)
        comm.all_reduce(sums)
        has_points = sums[:, -1:] > 0
        moved = np.where(has_points, sums[:, :-1] / np.maximum(sums[:, -1:], 1), centres)
        # All ranks have the same sums, so they stop at the same step.
        if np.allclose(moved, centres, rtol=0, atol=1e-9):
            break
        centres = moved
    return centres, step


def main():
    with pykolo.Communicator.from_env() as comm:
        mine = np.array_split(points(), comm.world_size)[comm.rank]
        first = first_centres(mine, comm)
        centres, steps = k_means(mine, first, comm)
        if comm.rank == 0:
            print(f"{comm.world_size} ranks, {steps} steps:\n{centres.round(3)}")
            if len(sys.argv) > 1:
                np.savez(sys.argv[1], first=first, centres=centres)


if __name__ == "__main__":
    main()
