#!/usr/bin/env bash
# Runs once, when PostgreSQL's volume is empty: a role and a database for each server.
set -euo pipefail

make_database() {
    psql --set ON_ERROR_STOP=1 --no-psqlrc --username "$POSTGRES_USER" --dbname postgres \
        --set name="$1" --set password="$2" <<'SQL'
CREATE ROLE :"name" LOGIN PASSWORD :'password';
CREATE DATABASE :"name" OWNER :"name";
SQL
}

make_database prefect "$PREFECT_DB_PASSWORD"
make_database mlflow "$MLFLOW_DB_PASSWORD"
