"""Tasks that come with tfdist; each is an example of a `tfdist.Task`."""
