"""Ingestion: preference pairs from files or the hub to validated Parquet."""
