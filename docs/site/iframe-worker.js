// Search runs in a worker, and a page that was opened as a file may not start one. There it runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class FrameWorker extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.frame = frame;
      this.send = frame.contentWindow.postMessage.bind(frame.contentWindow);
      addEventListener("message", (event) => {
        if (event.source !== frame.contentWindow) return;
        const received = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(received);
        if (this.onmessage) this.onmessage(received);
      });
      this.loaded = new Promise((resolve) => {
        const inside = frame.contentWindow.document;
        inside.open();
        inside.write(
          "<!doctype html><script>postMessage = (data) => parent.postMessage(data, '*');" +
          "importScripts = (...urls) => urls.forEach((url) => document.write('<script src=\"' + url + '\"></' + 'script>'));" +
          "</" + "script><script src=\"" + new URL(url, location.href) + "\"></" + "script>",
        );
        inside.close();
        frame.addEventListener("load", resolve);
      });
    }

    postMessage(data) { this.loaded.then(() => this.send(data, "*")); }

    terminate() { this.frame.remove(); }
  };
}
