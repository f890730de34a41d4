//! Enumerations whose values have names: labels of statistics, words of configurations and
//! command lines.

/// Declares an enumeration with a name for each value. It has `ALL`, `name` and `Display`.
#[macro_export]
macro_rules! named_enum {
    (
        $(#[$meta:meta])*
        $vis:vis enum $type:ident { $($(#[$about:meta])* $value:ident = $name:literal,)* }
    ) => {
        $(#[$meta])*
        $vis enum $type { $($(#[$about])* $value,)* }

        impl $type {
            /// All values, in the order of their numbers.
            $vis const ALL: [$type; [$($name),*].len()] = [$($type::$value),*];

            /// Its name.
            $vis const fn name(self) -> &'static str {
                match self { $($type::$value => $name,)* }
            }
        }

        impl ::core::fmt::Display for $type {
            fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                f.pad(self.name())
            }
        }
    };
}
