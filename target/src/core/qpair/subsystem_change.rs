//! What a queue learns of the configuration while it is open.

use std::sync::Arc;

use super::{Io, QueuePair, QueueRole};
use crate::core::controller::ControllerKind;
use crate::core::controller::association::Association;
use crate::core::subsystem::Subsystem;

impl QueuePair {
    /// A subsystem has changed.
    pub fn on_subsystem(&mut self, new: &Arc<Subsystem>, io: &mut Io<'_>) {
        // What a host sees of its own is made once, for all of its queues.
        let view = |association: &Association| match new.is_the_same_for_all() {
            true => Some(Arc::clone(new)),
            false => io.shared.registry.view(association),
        };
        match &mut self.serves {
            QueueRole::Admin(controller) if controller.association.subsystem == new.nqn => {
                if let Some(view) = view(&controller.association) {
                    controller.replace_subsystem(view);
                }
            }
            QueueRole::Io { association, subsystem, .. } if subsystem.nqn == new.nqn => {
                if let Some(view) = view(association) {
                    *subsystem = view;
                    self.find_rows(io);
                    self.find_limits();
                }
            }
            _ => {}
        }
        self.raise_events(io);
    }

    /// What discovery answers has changed, for some host.
    pub fn on_discovery_changed(&mut self, io: &mut Io<'_>) {
        let QueueRole::Admin(controller) = &mut self.serves else { return };
        let ControllerKind::Discovery(service) = &mut controller.role else { return };
        let (_, records) =
            io.shared.registry.discovery(&controller.association.host, controller.local);
        if service.is_news(&records) {
            controller.events.discovery_changed();
            self.raise_events(io);
        }
    }
}
