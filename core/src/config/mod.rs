//! The TOML file that chooses the parts.
/// A part's own table.
#[derive(Clone, Debug)]
pub struct PartTable {
    text: String,
    file: String,
}
impl PartTable {
    /// See the config reference.
    pub fn from_text(text: &str, file: &str) -> Self {
        Self { text: text.into(), file: file.into() }
    }
    /// See the config reference.
    pub fn text(&self) -> &str {
        &self.text
    }
    /// See the config reference.
    pub fn file(&self) -> &str {
        &self.file
    }
    /// See the config reference.
    pub fn parse<T: serde::de::DeserializeOwned>(&self, part: &str) -> crate::Result<T> {
        toml::from_str(&self.text).map_err(|e| {
            crate::Error::new(crate::ErrorKind::Config, "parse", format!("{part} {e}"))
        })
    }
}
