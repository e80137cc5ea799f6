"""Reports on a build: figures as JSON, a page for people, and graphs as text and drawings."""
