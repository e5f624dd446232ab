"""HTTP below the APIs: addresses, who may ask, the access log, the server process and its end."""
