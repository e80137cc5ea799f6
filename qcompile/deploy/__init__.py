"""A model as an application of a cluster's own server: Ray Serve."""
