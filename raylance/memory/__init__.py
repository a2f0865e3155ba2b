"""Memory of rows: lent, copied and kept in ways that Arrow and the C library do not offer by themselves."""
