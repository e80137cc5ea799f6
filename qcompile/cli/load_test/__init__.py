"""`qcompile bench --serve`: measures a server that speaks OpenAI's protocol while many clients ask at once.

A level is a number of clients that each wait for their answer (`--concurrency`), or requests that arrive at random at a
mean rate (`--rate`). `workload` has what is asked, `server` starts or probes the server, `client` sends requests,
`level` runs a level, `answers` reads what came, and `figures`, `plot` and `text` report.
"""
