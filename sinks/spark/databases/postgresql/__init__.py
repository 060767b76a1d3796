"""PostgreSQL through psycopg 3: binary COPY, unlogged staging tables, prepared transactions."""
