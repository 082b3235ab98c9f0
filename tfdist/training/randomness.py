"""Random numbers of a step: others for each replica and step, the same on every backend and after every start.

Layers draw from Keras seed generators, whose state is (seed, counter). Each replica draws from the seed plus
rank · 0x9E3779B9 (the golden ratio's bits, so that seeds which people choose do not meet), and the counters of all
replicas move on alike.
"""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.errors import UsageError

__all__ = ["OF_A_STEP", "is_seed", "moved_on", "refuse_stateful", "seed_of_replica"]

_STRIDE = 0x9E3779B9

_STATEFUL = {
    "AllCandidateSampler",
    "FixedUnigramCandidateSampler",
    "LearnedUnigramCandidateSampler",
    "LogUniformCandidateSampler",
    "Multinomial",
    "NonDeterministicInts",
    "ParameterizedTruncatedNormal",
    "RandomCrop",
    "RandomGamma",
    "RandomPoisson",
    "RandomPoissonV2",
    "RandomShuffle",
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "RngReadAndSkip",
    "RngSkip",
    "SampleDistortedBoundingBox",
    "SampleDistortedBoundingBoxV2",
    "StatefulRandomBinomial",
    "StatefulStandardNormal",
    "StatefulStandardNormalV2",
    "StatefulTruncatedNormal",
    "StatefulUniform",
    "StatefulUniformFullInt",
    "StatefulUniformInt",
    "ThreadUnsafeUnigramCandidateSampler",
    "TruncatedNormal",
    "UniformCandidateSampler",
}


OF_A_STEP = (
    "train_step",
    "Use tf.random.stateless_normal and the like with seed=replica.seed(), or a Keras layer with its own "
    "SeedGenerator.",
)
"""What `refuse_stateful` says of a compiled step."""


def is_seed(variable: keras.Variable) -> bool:
    """Whether a variable is the state of a Keras seed generator."""
    return variable.path.endswith("seed_generator_state") and variable.shape == (2,)


def seed_of_replica(variable: keras.Variable, replica: tf.Tensor) -> tf.Tensor:
    """The state that a replica draws from. Inside the replica step."""
    state = tf.convert_to_tensor(variable.value)
    return tf.stack([state[0] + tf.cast(replica, state.dtype) * tf.cast(_STRIDE, state.dtype), state[1]])


def moved_on(variable: keras.Variable, state: tf.Tensor) -> tf.Tensor:
    """The state to store after a replica's draws: its counter, and the seed of all."""
    return tf.stack([tf.convert_to_tensor(variable.value)[0], state[1]])


def refuse_stateful(graph: tf.Graph, what: str, instead: str) -> None:
    """Raises UsageError where a function draws random numbers that each process counts for itself.

    Args:
        graph: of the traced function.
        what: the function, for people.
        instead: what it should do.
    """
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    found = sorted({node.op for node in nodes if node.op in _STATEFUL})
    if found:
        raise UsageError(
            f"{what} draws random numbers with TensorFlow's stateful {', '.join(found)} (tf.random.normal, "
            f"tf.random.shuffle and the like), which differ between backends. {instead}"
        )
