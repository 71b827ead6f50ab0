"""Data-parallel training with JAX on CPUs: each rank has a part of each batch, and the ranks average
their gradients.

    kolo run -n 4 -- python jax_step.py [FILE]

kolo reads the gradients in JAX's own memory (DLPack). JAX's arrays do not change, so the averages
go into one of numpy.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pykolo
from jax.flatten_util import ravel_pytree

BATCH = 64
STEPS = 30


def samples(count=BATCH * STEPS, seed=3):
    generator = np.random.default_rng(seed)
    inputs = generator.normal(size=(count, 8)).astype(np.float32)
    labels = np.sin(inputs[:, 0]) + inputs[:, 1] * inputs[:, 2]
    return inputs.reshape(STEPS, BATCH, 8), labels.astype(np.float32).reshape(STEPS, BATCH)


def first_weights(seed=4):
    """The same on all ranks."""
    keys = jax.random.split(jax.random.key(seed), 2)
    return {
        "hidden": jax.random.normal(keys[0], (8, 32)) / 8**0.5,
        "bias": jnp.zeros(32),
        "out": jax.random.normal(keys[1], (32,)) / 32**0.5,
    }


def loss_of(weights, inputs, labels):
    hidden = jnp.tanh(inputs @ weights["hidden"] + weights["bias"])
    return jnp.mean((hidden @ weights["out"] - labels) ** 2)


@jax.jit
def loss_and_gradients(weights, inputs, labels):
    """Both in one array, for one collective."""
    loss, gradients = jax.value_and_grad(loss_of)(weights, inputs, labels)
    return jnp.append(ravel_pytree(gradients)[0], loss)


@jax.jit
def stepped(weights, averages):
    flat, unravel = ravel_pytree(weights)
    return unravel(flat - 0.1 * averages[:-1])


def train(comm):
    """Returns the loss of each step, and the weights."""
    weights = first_weights()
    losses = []
    for inputs, labels in zip(*samples()):
        # Parts of equal length, so that the average of their means is the mean of the batch.
        part = np.s_[comm.rank :: comm.world_size]
        mine = loss_and_gradients(weights, inputs[part], labels[part])
        averages = comm.all_reduce(mine, np.empty(mine.shape, mine.dtype), op="average")
        weights = stepped(weights, averages)
        losses.append(float(averages[-1]))
    return np.array(losses), weights


def main():
    with pykolo.Communicator.from_env() as comm:
        if BATCH % comm.world_size:
            raise SystemExit(f"{comm.world_size} ranks cannot share batches of {BATCH} evenly")
        losses, weights = train(comm)
        if comm.rank == 0:
            print(f"{comm.world_size} ranks: loss {losses[0]:.4f} at first, {losses[-1]:.4f} at the end")
            if len(sys.argv) > 1:
                np.savez(sys.argv[1], losses=losses, **weights)


if __name__ == "__main__":
    main()
