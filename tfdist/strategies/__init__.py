"""From the name of a backend to a `tf.distribute.Strategy`."""
