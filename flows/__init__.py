"""One Prefect flow per stage, the chain, and the command line over them."""
