"""The course of the page: chapters, whose texts are the pages of docs/concepts, and figures that follow sliders."""
