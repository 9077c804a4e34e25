"""The order of things: Prefect flows, worker processes, configuration files and the command line."""
