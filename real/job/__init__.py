"""One job: starts and watches the processes that train, ends them, and names the one that failed."""
