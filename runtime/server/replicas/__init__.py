"""One address for several processes of a model: a router that chooses a process for each request."""
