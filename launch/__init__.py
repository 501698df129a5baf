"""From the command line to a run record: configuration, engines that start ranks, and the loop each rank runs."""
