"""Who am I, what may this process use, and how do the processes of one job talk: before TensorFlow starts."""
