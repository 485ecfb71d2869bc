// Search runs in a worker, and browsers start none for a page that was opened from a folder. There, its script runs in
// a hidden frame instead. The theme's offline plugin loads a public script for this; the site may load nothing.

if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = Object.assign(document.createElement("iframe"), { hidden: true });
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      const load = src =>
        new Promise((onload, onerror) => {
          inside.document.body.append(Object.assign(inside.document.createElement("script"), { src, onload, onerror }));
        });
      inside.importScripts = async (...urls) => {
        for (const each of urls) await load(each);
      };
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = load(String(url));
    }

    async postMessage(data) {
      await this.ready;
      const inside = this.frame.contentWindow;
      inside.dispatchEvent(new inside.MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
