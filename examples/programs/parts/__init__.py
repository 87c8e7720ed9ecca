"""What several programs are built from: blocks of models, and data that packages ship."""
