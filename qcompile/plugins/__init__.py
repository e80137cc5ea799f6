"""What other packages add to qcompile: passes, recipes and weight formats, by entry points."""
