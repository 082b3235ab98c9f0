"""What lets several processes that run one program act as one process. Both multi-process strategies call it."""

from __future__ import annotations

import sys

import tensorflow as tf

from tfdist.as_one import files, orders, seeds
from tfdist.cluster.channel import Channel

__all__ = ["act_as_one", "opened_as_one"]


def opened_as_one(strategy: tf.distribute.Strategy, channel: Channel) -> None:
    """Call it once the strategy is open, on every process."""
    seeds.share_seeds(strategy)
    if channel.size > 1:
        orders.watch_orders(channel)


def act_as_one() -> None:
    """Call it whenever a scope of the strategy is entered: by then the program has imported what it uses."""
    files.write_whole()
    if "keras" in sys.modules:
        from tfdist.as_one import keras_files, keras_steps, private_keras

        keras_files.write_whole()
        keras_files.follow_the_chief()
        keras_steps.step_alike()
        private_keras.build_without_reducing()
