"""One job: what starts, watches, ends and explains the processes that train, whoever launched them."""
