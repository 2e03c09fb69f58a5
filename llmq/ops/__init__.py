"""Operations: check shapes and dtypes, choose the grid, launch."""
