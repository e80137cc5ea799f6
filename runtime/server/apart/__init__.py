"""A server in two processes: one has the model and its engine, the other one answers clients over HTTP."""
