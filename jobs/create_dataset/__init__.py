"""The way from files and tables to a Lance dataset that raylance can train on.

pyarrow and tarfile read the files. The `datasets` library could read most sources in one way, by streaming, but it
loses or changes values without an error (version 5.2): it ends at a damaged header of a tar, fills a short CSV row,
shifts the columns of rows that are all longer than the header, makes floats of 64-bit integers beside nulls, fills a
column that a Parquet file lacks with nulls, and rounds float64 to the float32 of the first file.
"""
