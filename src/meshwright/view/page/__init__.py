"""The page: what its views show as plain data, and the HTML, CSS and JavaScript that draw it, live or in one file."""
