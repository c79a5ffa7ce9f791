"""Pipeline stages and tensor parallel inside one runtime. Imports weights and what is below."""
