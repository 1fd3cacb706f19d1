"""Rows of Parquet files in a bucket, on the hub or on a web server, read by range."""
