"""MariaDB and MySQL through PyMySQL: INSERTs of many rows, staging tables in InnoDB, no prepared transactions."""
