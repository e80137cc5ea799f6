"""What qcompile asks of the system that it runs on."""
